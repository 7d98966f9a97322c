-- Goes before a script that changes leases, where servers can take over from each other: returns an error, and changes
-- nothing, if this server is not in charge any more, or is in charge anew.
--
-- ARGV[last]  the replication id that the server had when the connection was made; removed here

do
  local id, replication = table.remove(ARGV), redis.call('INFO', 'replication')
  if not string.find(replication, 'role:master', 1, true)
    or not string.find(replication, 'master_replid:' .. id, 1, true) then
    return redis.error_reply('TAKENOVER the server is not the one that it was')
  end
end

