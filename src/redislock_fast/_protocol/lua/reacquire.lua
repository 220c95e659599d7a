-- Reacquire: set the ttl of a lock that is held with this token.
-- KEYS[1]  the lock's name
-- ARGV[1]  token
-- ARGV[2]  ttl in milliseconds, 0 for none
-- returns  1 if the ttl was set or removed, 0 if the lock is not held with this token

-- The value of a contended lock; only tokens that the library made get the contended flag.
local marked = #ARGV[1] == 36 and string.sub(ARGV[1], 1, 4) == 'rlf:' and ARGV[1] .. '+' or nil
local value = redis.call('get', KEYS[1])
if value == ARGV[1] or value == marked then
    if ARGV[2] == '0' then
        redis.call('persist', KEYS[1])
    else
        redis.call('pexpire', KEYS[1], ARGV[2])
    end
    return 1
end
return 0
