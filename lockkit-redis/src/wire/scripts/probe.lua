-- Finds out which commands the other scripts may call. Leaves nothing behind: the server refuses these
-- calls for their arguments once it would allow them, or they find nothing to change, or it is undone.
--
-- KEYS[1], KEYS[2]  names that nothing has
--
-- Returns for each call  the command
--                        the error; empty if there is none
--                        which locks need it: "all", or "queue" for those that are shared, or have an order

local answers, which = {}, 'all'
local function try(command, ...)
  local reply = redis.pcall(command, ...)
  answers[#answers + 1] = command
  answers[#answers + 1] = type(reply) == 'table' and reply.err or ''
  answers[#answers + 1] = which
end

try('GET', KEYS[1])
try('SET', KEYS[1], '', 'PX', '0')
try('DEL', KEYS[1])
try('INCRBY', KEYS[2], 'x')
try('PEXPIRE', KEYS[1], '1')
try('PTTL', KEYS[1])
try('TIME')

which = 'queue'
try('EXISTS', KEYS[1])
try('HSET', KEYS[1], 'field', '')
redis.pcall('DEL', KEYS[1])
try('HGET', KEYS[1], 'field')
try('HDEL', KEYS[1], 'field')
try('PEXPIREAT', KEYS[1], '1')
try('PUBSUB', 'NUMSUB')
try('ZADD', KEYS[1], 'XX', '1', 'member')
try('ZCARD', KEYS[1])
try('ZRANGE', KEYS[1], '0', '0')
try('ZRANGEBYSCORE', KEYS[1], '0', '0')
try('ZRANK', KEYS[1], 'member')
try('ZREM', KEYS[1], 'member')
try('ZSCORE', KEYS[1], 'member')
return answers
