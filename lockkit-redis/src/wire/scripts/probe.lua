-- Finds out which commands the other scripts may call. Changes nothing: the server refuses these calls for their
-- arguments once it would allow them, or they find nothing to change.
--
-- KEYS[1], KEYS[2]  names that nothing has
--
-- Returns for each call  the command
--                        the error; empty if there is none

local answers = {}
local function try(command, ...)
  local reply = redis.pcall(command, ...)
  answers[#answers + 1] = command
  answers[#answers + 1] = type(reply) == 'table' and reply.err or ''
end

try('GET', KEYS[1])
try('SET', KEYS[1], '', 'PX', '0')
try('DEL', KEYS[1])
try('INCRBY', KEYS[2], 'x')
try('PEXPIRE', KEYS[1], '1')
try('PTTL', KEYS[1])
try('TIME')
return answers
