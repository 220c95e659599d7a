-- Renew permit: set the end of a permit that has not ended, unless that is later.
-- KEYS     permits alone: it can be renewed while the keys move to another node
-- ARGV[1]  token
-- ARGV[2]  ttl in milliseconds
-- returns  1 if this token has a permit, else 0
if not held(ARGV[1]) then
    return 0
end
redis.call('zrem', permits, '') -- a server without memory refuses ZADD, except to a script that has written before
set_end(ARGV[1], ARGV[2])
return 1
