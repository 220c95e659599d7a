-- Redeem: put a caller's own token in the place of the ticket to which the lock was granted. May be repeated.
-- KEYS[1]  the lock's name
-- ARGV[1]  the caller's own token
-- ARGV[2]  ticket
-- ARGV[3]  ttl in milliseconds, 0 for none
-- returns  {1}: the lock was held with the ticket, and is now held with the token
--          {2}: it was held with the token already; its ttl was set
--          {0}: it is another's, or free

-- The values of a contended lock; only tokens that the library made get the contended flag.
local ticket_flagged = ARGV[2] .. '+'
local token_flagged = #ARGV[1] == 36 and string.sub(ARGV[1], 1, 4) == 'rlf:' and ARGV[1] .. '+' or nil
local value = redis.call('get', KEYS[1])
local new_value, verdict
if value == ARGV[2] or value == ticket_flagged then
    new_value, verdict = value == ticket_flagged and token_flagged or ARGV[1], 1
elseif value == ARGV[1] or (value and value == token_flagged) then
    new_value, verdict = value, 2
else
    return {0}
end
if ARGV[3] == '0' then
    redis.call('set', KEYS[1], new_value)
else
    redis.call('set', KEYS[1], new_value, 'px', ARGV[3])
end
return {verdict}
