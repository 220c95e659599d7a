-- Reacquire: set the ttl of a lock that is held with this token.
-- KEYS[1]  the lock's name
-- ARGV[1]  token
-- ARGV[2]  ttl in milliseconds
-- returns  1 if the ttl was set, 0 if the lock is not held with this token
local value = redis.call('get', KEYS[1])
if value == ARGV[1] or value == ARGV[1] .. '+' then -- marked: somebody waits in the queue
    redis.call('pexpire', KEYS[1], ARGV[2])
    return 1
end
return 0
