-- Finds out since when this server has been in charge, and from when on it may grant leases. A server that took over
-- may lack leases that its predecessor granted, so it grants nothing until all of them must have lapsed.
--
-- KEYS[1]  the note: "<epoch>:<run id>:<replication id>:<since, in ms of the server's clock>", with a "?" behind it if nobody has
--          seen that, and it is what the server says of its uptime
-- ARGV[1]  for how long to pause after a server took over, in ms. It is not part of the note, for each client has its own
-- ARGV[2]  the note as the client has seen it last; empty if it has not. In a cluster the one here can have left with its slot
--
-- Returns {note, ms until it may grant, ms of the server's clock since when it may}
--
-- A replication id names a server's time as a primary: each promotion and each start makes a new one. (So does a
-- primary that had no replica for `repl-backlog-ttl`, an hour. It then forgets its second id, so that it is told from a
-- promotion by having none: whoever was promoted an hour ago has nothing to wait for. And so does one without a backlog that gets
-- its first replica, also if it was promoted a moment ago, before it was in sync with its primary: `syncCommand` in replication.c.)

local call = redis.call
local CENTURY = 3155760000000
local server, replication = call('INFO', 'server'), call('INFO', 'replication')
local function field(text, name)
  return string.match(text, name .. ':(%w+)') or ''
end
if field(replication, 'role') ~= 'master' then
  return redis.error_reply('TAKENOVER the server is a replica')
end
local run, id = field(server, 'run_id'), field(replication, 'master_replid')
local promoted = string.find(field(replication, 'master_replid2'), '[^0]')
local has_backlog = field(replication, 'repl_backlog_active') ~= '0'
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local pause = tonumber(ARGV[1])

local stored = call('GET', KEYS[1])
local epoch, since, doubt, is_known
for _, note in ipairs({ARGV[2], stored or ''}) do
  local its_epoch, its_run, its_id, its_since, its_doubt = string.match(note, '^(%x+):(%x+):(%x+):(%d+)(%??)$')
  is_known = is_known or its_run
  if its_run == run and (its_id == id or not promoted) and (not epoch or doubt > its_doubt) then
    epoch, since, doubt = its_epoch, tonumber(its_since), its_doubt
  end
end
if not epoch then
  epoch, since, doubt = id, now, ''
  if not promoted and not has_backlog and not is_known then
    -- In charge since it started, at the latest. The uptime is the difference of two truncated seconds. It is one of the wall
    -- clock, which may have been set forward since the start: no word against those who know of a run before.
    since = now - math.max(0, field(server, 'uptime_in_seconds') - 1) * 1000
    doubt = '?'
  end
elseif doubt == '?' and ARGV[2] ~= '' and not string.find(ARGV[2], ':' .. run .. ':', 1, true) then
  -- The client saw another run in charge. So this one began later than that, and nobody has seen when.
  since, doubt = now, ''
end
local note = table.concat({epoch, run, id, string.format('%.0f', since) .. doubt}, ':')
if note ~= stored then
  -- A server that is full refuses a `SET`, unless the script has written before, and without its note nobody could connect. This
  -- takes no memory and, unlike `DEL`, loses no note if the `SET` is refused for another reason. `SET` ends the time to live.
  redis.pcall('PEXPIRE', KEYS[1], CENTURY)
  call('SET', KEYS[1], note)
end
local from = since + pause
-- The clock may have been set back since.
return {note, math.max(0, math.min(from - now, pause)), from}
