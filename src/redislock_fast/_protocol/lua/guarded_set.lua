-- Guarded set: the script that `Guard.set` runs after guard.lua.
-- KEYS[1]  the key
-- ARGV[1]  value
-- ARGV[2]  ttl in milliseconds, 0 for none
if ARGV[2] == '0' then
    redis.call('set', KEYS[1], ARGV[1])
else
    redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
end
