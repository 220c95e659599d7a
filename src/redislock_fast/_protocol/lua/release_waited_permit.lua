-- The rest of release_permit.lua, where callers wait. The token may be in the queue, too: a request to join that was
-- executed after the permit's end has put it there, and what it got nobody would use.
if redis.call('zrem', queue, ARGV[1]) == 1 then
    redis.pcall('hdel', waiters, 't' .. ARGV[1])
end
if removed == 0 then
    return 0
end
return hand_over() and 2 or 1 -- where too many waiters are gone, a health check of another one hands over
