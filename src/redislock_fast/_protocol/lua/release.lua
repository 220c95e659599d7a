-- Release: delete the lock if it is held with this token.
-- KEYS[1]  the lock's name
-- ARGV[1]  token
-- ARGV[2]  optional, "1": if the queue is to be looked at (the value is the token and a "+"), leave that to pass_on.lua
-- returns  1 if the lock was released, 0 if it is not held with this token, 2 if the queue is to be looked at
-- Marked when somebody waits in the queue; only tokens that the library made itself are.
local marked = #ARGV[1] == 36 and string.sub(ARGV[1], 1, 4) == 'rlf:' and ARGV[1] .. '+' or nil
local value = redis.call('get', KEYS[1])
if value == ARGV[1] or (value == marked and ARGV[2] ~= '1') then
    redis.call('del', KEYS[1])
    return 1
end
if value == marked then
    return 2
end
return 0
