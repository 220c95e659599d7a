-- The rest of acquire_permit.lua, where callers wait, or an operator has set the limit.
local most = limit_for(own)
if most < 0 then -- those who wait go on, until it is set anew
    return redis.error_reply('ERR the limit of the semaphore is no number, resize sets or removes it: ' .. limit)
end
room = count_room(most)
hand_over()
if redis.call('exists', queue) == 1 then -- nobody is overtaken
    room = 0
end
local answer = take()
return most == own and answer or {answer, most}
