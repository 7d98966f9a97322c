-- ARGV[last]  what the leases are marked with that this server granted while in charge; removed here
local mark = table.remove(ARGV)

