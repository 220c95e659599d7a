-- Release: delete the lock if it is held with this token.
-- KEYS[1]  the lock's name
-- ARGV[1]  token
-- returns  1 if the lock was released, 0 if it is not held with this token
if redis.call('get', KEYS[1]) == ARGV[1] then
    redis.call('del', KEYS[1])
    return 1
end
return 0
