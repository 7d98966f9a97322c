-- Admits a holder to a fenced value if no higher fence was seen, and remembers its fence.
--
-- KEYS[1]  the value
-- KEYS[2]  the highest fence seen: "<fence>", or "<fence> <fence of a writer>" if the highest is that of a reader
-- KEYS[3]  absent, or where the last write is noted: "<client> <fence> <number>"
-- ARGV[1]  the holder's fence
-- ARGV[2]  absent: only claim; present: the new value
-- ARGV[3]  absent, or the client that writes
-- ARGV[4]  the number of this write among those of the client
--
-- A write that was given up on its way may arrive after later ones of the same holder. If the client numbers them, such a write changes
-- nothing: it is as if it had come in its turn.
--
-- Returns an empty string if the holder is admitted, else the highest fence seen.
--
-- Fences are compared as decimal text, shorter ones first: as numbers of Lua they would be exact only up to 2^53.

local record, fence = redis.call('GET', KEYS[2]) or '', ARGV[1]
local highest = string.match(record, '^(%d*) ?%d*$')
if not highest then
  return record
end
if fence == '0' or #fence < #highest or (#fence == #highest and fence < highest) then
  return highest == '' and '0' or highest
end
-- Also if it is there already: a server that was made a replica refuses that.
redis.call('SET', KEYS[2], fence)
if ARGV[3] then
  local holder = ARGV[3] .. ' ' .. fence .. ' '
  local last = redis.call('GET', KEYS[3]) or ''
  if string.sub(last, 1, #holder) == holder and tonumber(ARGV[4]) <= tonumber(string.sub(last, #holder + 1)) then
    return ''
  end
  redis.call('SET', KEYS[3], holder .. ARGV[4])
end
if ARGV[2] then
  redis.call('SET', KEYS[1], ARGV[2])
end
return ''
