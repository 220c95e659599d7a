-- Done: note that a job is done, while its lock is held, or look whether it is. Repeated, it does the same.
-- KEYS[1]  the lock's name
-- KEYS[2]  done, a string: while it is there, the job counts as done
-- ARGV[1]  token; empty: only look
-- ARGV[2]  for how many milliseconds the job counts as done; not used by a look
-- returns  1 if the job counts as done, 0 if it does not: then nothing was noted, since the lock is not held with this
--          token
-- A caller that takes the lock after this script finds the mark: it is noted while the lock is held, and so before the
-- next one can have the lock.
if ARGV[1] == '' then
    return redis.call('get', KEYS[2]) and 1 or 0
end
local value = redis.call('get', KEYS[1])
if value ~= ARGV[1] and value ~= ARGV[1] .. '+' then
    return 0
end
redis.call('set', KEYS[2], '1', 'px', ARGV[2])
return 1
