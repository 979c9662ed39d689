-- Create a tenant with its first key, or nothing at all. A repeat of the same call changes nothing.
-- KEYS: tenants, tenant names, keys, key digests, the tenant's key ids
-- ARGV: tenant id, tenant JSON, folded name, key id, key digest, key JSON
-- Returns the id of the tenant that has the name: ARGV[1] on success.
local holder = redis.call('HGET', KEYS[2], ARGV[3])
if holder then
    return holder
end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
redis.call('HSET', KEYS[4], ARGV[4], ARGV[5])
redis.call('SADD', KEYS[5], ARGV[4])
return ARGV[1]
