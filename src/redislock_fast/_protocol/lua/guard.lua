-- Guard: precedes a script that writes, and lets it run unless a higher fence has written.
-- KEYS[#KEYS]  the guard's note: the highest fence that has written. It never expires
-- ARGV[#ARGV]  fence
-- Both are removed, so the script that follows finds its own keys and arguments alone.
-- returns  the error "STALEFENCE <highest>" without running the script; else what the script returns
do
    local note, fence = table.remove(KEYS), table.remove(ARGV)
    local highest = redis.call('get', note)
    if highest and tonumber(highest) > tonumber(fence) then
        return redis.error_reply('STALEFENCE ' .. highest)
    end
    if highest ~= fence then -- before the write: if the write fails, the guard is only stricter
        redis.call('set', note, fence)
    end
end
