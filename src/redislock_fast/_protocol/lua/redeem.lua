-- Redeem: put a caller's own token in the place of the ticket to which the lock was granted. May be repeated.
-- KEYS[1]  the lock's name
-- KEYS[2]  optional: fence, as for acquire_fenced.lua; then the holder is numbered, too
-- ARGV[1]  the caller's own token
-- ARGV[2]  ticket
-- ARGV[3]  ttl in milliseconds, 0 for none
-- returns  {1}, with KEYS[2] {1, number}: the lock was held with the ticket, and is now held with the token
--          {2}, with KEYS[2] {2, number}: it was held with the token already; its ttl was set
--          {0}: it is another's, or free
-- Numbers first, as acquire_fenced.lua does: wherever it fails in between, no number is given twice.
local lock, fence = KEYS[1], KEYS[2]
local token, ticket = ARGV[1], ARGV[2]

-- A holder that takes the lock gets a new number, even if the same token has had one before.
local function number_of_holder(is_new)
    local noted = redis.call('hmget', fence, 'token', 'number')
    if not is_new and noted[1] == token then
        return tonumber(noted[2])
    end
    local number = redis.call('hincrby', fence, 'number', 1)
    redis.call('hset', fence, 'token', token)
    return number
end

-- The values of a contended lock; only tokens that the library made get the contended flag.
local ticket_flagged = ticket .. '+'
local token_flagged = #token == 36 and string.sub(token, 1, 4) == 'rlf:' and token .. '+' or nil
local value = redis.call('get', lock)
local answer
if value == ticket or value == ticket_flagged then
    value = value == ticket_flagged and token_flagged or token
    answer = {1}
elseif value == token or (value and value == token_flagged) then
    answer = {2}
else
    return {0}
end
if fence then
    answer[2] = number_of_holder(answer[1] == 1)
end
if ARGV[3] == '0' then
    redis.call('set', lock, value)
else
    redis.call('set', lock, value, 'px', ARGV[3])
end
return answer
