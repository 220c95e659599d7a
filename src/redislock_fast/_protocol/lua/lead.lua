-- Lead: note who leads, while the lock is held. Repeated, it changes nothing.
-- KEYS[1]  the lock's name
-- KEYS[2]  leader, a hash: "id" of the leader's token, "term", "value", and "since" in microseconds
-- ARGV[1]  token
-- ARGV[2]  id of the token, which releases nothing
-- ARGV[3]  term
-- ARGV[4]  value
-- returns  1 if it is noted, 0 if the lock is not held with this token
-- The hash never expires. It counts while the lock is held with the token of its id.
local value = redis.call('get', KEYS[1])
if value ~= ARGV[1] and value ~= ARGV[1] .. '+' then
    return 0
end
if redis.call('hget', KEYS[2], 'id') ~= ARGV[2] then
    local time = redis.call('time')
    local since = string.format('%d%06d', time[1], time[2])
    redis.call('hset', KEYS[2], 'id', ARGV[2], 'term', ARGV[3], 'value', ARGV[4], 'since', since)
end
return 1
