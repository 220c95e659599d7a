-- Pass on: release a lock that may be contended, and hand it over to the first in the queue.
-- KEYS[1]  the lock's name
-- KEYS[2]  queue
-- KEYS[3]  waiters
-- ARGV[1]  token
-- returns  1 if the lock was released, 2 if it was handed over, 0 if it is not held with this token, 3 if it is still
--          held, since too many waiters were gone: the script is to be sent again
if held(ARGV[1]) then
    local given = hand_over()
    if given == nil then
        return 3
    end
    return given and 2 or 1
end
return 0
