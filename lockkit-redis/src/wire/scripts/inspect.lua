-- Reads locks. Changes nothing.
--
-- KEYS     lock and fence counter, in pairs
--
-- Returns for each pair  the value; nil if there is none; the type's name as a status if it is not a string; an error if it
--                        can't be read
--                        the remaining time in ms, as PTTL gives it
--                        the counter; nil if there is none, or it is not a string

local answers = {}
for i = 1, #KEYS, 2 do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) == 'table' and string.find(value.err, 'WRONGTYPE', 1, true) then
    value = redis.call('TYPE', KEYS[i])
  end
  local counter = redis.pcall('GET', KEYS[i + 1])
  local at = #answers
  answers[at + 1] = value
  answers[at + 2] = redis.call('PTTL', KEYS[i])
  answers[at + 3] = type(counter) == 'string' and counter
end
return answers
