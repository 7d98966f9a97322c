-- ARGV[last - 1]  what the leases are marked with that this server granted while in charge; removed here
-- ARGV[last]      "@" and the beginning of the server's run id: by whose clock moments are noted; removed here
local run_mark = table.remove(ARGV)
local mark = table.remove(ARGV)

