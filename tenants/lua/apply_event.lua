-- Book one finished request, exactly once: all of it or nothing, in the tenant's slot.
-- KEYS: applied sequences, ledger stream, minute usage, minutes, request ids seen this hour
-- ARGV: spool id, previous sequence, sequence, request id, minute, seconds to keep the ids, event JSON, the suffix of
--       its usage fields, and its increments as `class amount class amount ...`, the first of them `requests 1`
-- Integers stay text: Lua numbers are doubles and lose digits above 2^53.
-- Returns 1 booked, 0 already booked from this spool, 2 already booked from another spool,
--        -1 this Redis misses earlier events of the spool: send them first.
local last = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
if tonumber(ARGV[3]) <= last then
    return 0
end
if tonumber(ARGV[2]) > last then
    return -1
end
local fresh = redis.call('SADD', KEYS[5], ARGV[4])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if fresh == 0 then
    return 2
end
redis.call('EXPIRE', KEYS[5], ARGV[6], 'NX')
redis.call('XADD', KEYS[2], '*', 'event', ARGV[7])
for class, amount in string.gmatch(ARGV[9], '(%S+) (%S+)') do
    local sum = redis.call('HINCRBY', KEYS[3], class .. ARGV[8], amount)
    if class == 'requests' and sum == 1 then
        redis.call('ZADD', KEYS[4], ARGV[5], ARGV[5])
    end
end
return 1
