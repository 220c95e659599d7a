-- Release: delete the lock if it is held with this token.
-- KEYS[1]  the lock's name
-- ARGV[1]  token
-- ARGV[2]  optional, "1": leave a contended lock (its value is the token and a "+") to pass_on.lua
-- returns  1 if the lock was released, 0 if it is not held with this token, 2 if it is left to pass_on.lua

-- The value of a contended lock; only tokens that the library made get the contended flag.
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
