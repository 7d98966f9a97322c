-- Reads a record, or changes it from what was seen to what is new.
--
-- KEYS[1]  the record
-- ARGV[1]  what was seen; empty for no record. Without it the record is only read.
-- ARGV[2]  what is new; empty for no record
--
-- Returns  1 if it was changed, else 0
--          the record as it was; empty if there was none

local key, seen, new = KEYS[1], ARGV[1], ARGV[2]
local found = redis.call('GET', key) or ''
if seen ~= found or seen == new then
  return {0, found}
end
if new == '' then
  redis.call('DEL', key)
else
  redis.call('SET', key, new)
end
return {1, found}
