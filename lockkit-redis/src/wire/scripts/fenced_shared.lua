-- Admits a reader of a fenced value if no higher fence of a writer was seen, and remembers its fence if it is the highest.
--
-- KEYS[1]  the highest fence seen, as fenced.lua has it
-- ARGV[1]  the reader's fence
--
-- Returns an empty string if the reader is admitted, else the highest fence of a writer.

local record, fence = redis.call('GET', KEYS[1]) or '', ARGV[1]
local highest, writer = string.match(record, '^(%d*) ?(%d*)$')
if not highest then
  return record
end
if writer == '' then
  writer = highest == '' and '0' or highest
end

local function is_below(one, other)
  return #one < #other or (#one == #other and one < other)
end

if fence == '0' or is_below(fence, writer) then
  return writer
end
if is_below(highest, fence) then
  record = fence .. ' ' .. writer
end
-- Also if it stays as it is: a server that was made a replica refuses that.
redis.call('SET', KEYS[1], record)
return ''
