-- The key with this digest and its tenant, in one round trip.
-- KEYS: keys, tenants   ARGV: key digest
-- Returns {key JSON, tenant JSON or ''}, or nil when no key has the digest.
local key = redis.call('HGET', KEYS[1], ARGV[1])
if not key then
    return nil
end
local tenant_id = cjson.decode(key).tenant_id
return {key, tenant_id ~= '' and redis.call('HGET', KEYS[2], tenant_id) or ''}
