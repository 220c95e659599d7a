-- Release: delete the lock if it is held with this token.
-- KEYS[1]  the lock's name
-- ARGV[1]  token
-- ARGV[2]  optional, "1": if the queue is to be looked at (the value is the token and a "+"), leave that to pass_on.lua
-- returns  1 if the lock was released, 0 if it is not held with this token, 2 if the queue is to be looked at
local value = redis.call('get', KEYS[1])
if value == ARGV[1] or (value == ARGV[1] .. '+' and ARGV[2] ~= '1') then
    redis.call('del', KEYS[1])
    return 1
end
if value == ARGV[1] .. '+' then
    return 2
end
return 0
