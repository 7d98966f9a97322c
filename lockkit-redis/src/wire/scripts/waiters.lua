-- Reads who waits in the queue of a lock. Changes nothing.
--
-- KEYS     queue and places (see queue.lua)
-- ARGV[1]  how many are to be shown at most
--
-- Returns  for each, the next one first, its mode ("x", "s" or "p<limit>") and a value as it would have with the lease, but without
--          a fence

local match, sub = string.match, string.sub
-- How many are looked at: those that are gone without a word have places for a while, and are shown to nobody.
local PASSED = 1000
local time, most = redis.call('TIME'), tonumber(ARGV[1])
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = {}
for at = 0, PASSED - most, most do
  local tokens = redis.call('ZRANGE', KEYS[1], at, at + most - 1)
  for _, token in ipairs(tokens) do
    local place = redis.call('HGET', KEYS[2], token) or ''
    local mode, ends, length, rest = match(place, '^(.-)|.-|.-|.-|(.-)|(%d+)|(.*)$')
    if mode and tonumber(ends) > now then
      found[#found + 1] = mode
      found[#found + 1] = token .. ':1:0' .. sub(rest, length + 1)
    end
    if #found == 2 * most then
      return found
    end
  end
  if #tokens < most then
    break
  end
end
return found
