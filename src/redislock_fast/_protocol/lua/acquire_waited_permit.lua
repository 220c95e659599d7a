-- The rest of acquire_permit.lua, where callers wait, or an operator has set the limit.
local most = limit_for(own)
room = count_room(most)
hand_over()
if redis.call('exists', queue) == 1 then -- nobody is overtaken
    room = 0
end
local answer = take()
return most == own and answer or {answer, most}
