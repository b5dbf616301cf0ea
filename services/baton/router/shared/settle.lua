-- What has happened since: leases that ended, those that go on, and amounts to add to buckets (or take from).
-- A lease that goes on and is not known (Redis was flushed or restarted) is entered again.
--
-- KEYS: as for admit.lua
-- ARGV: life, bucket and window in ms, then as JSON: ended, held (lists of leases), deltas ([kind, bucket, amount])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local life, width, window = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local DAY = 86400000
local oldest = math.floor((now - window) / width)

for _, lease in ipairs(cjson.decode(ARGV[4])) do
  redis.call('ZREM', KEYS[3], lease)
end
for _, lease in ipairs(cjson.decode(ARGV[5])) do
  redis.call('ZADD', KEYS[3], now + life, lease)
  redis.call('PEXPIRE', KEYS[3], life)
end
for _, each in ipairs(cjson.decode(ARGV[6])) do
  local kind, bucket, amount = each[1], each[2], each[3]
  local key, field, expiry = KEYS[1], bucket, window + 2 * width
  if kind == 'tokens' then key = KEYS[2] end
  if kind == 'quota' then key, expiry = KEYS[4], 2 * DAY end
  if kind == 'quota' or bucket >= oldest then
    if redis.call('HINCRBY', key, field, amount) < 0 then redis.call('HSET', key, field, 0) end
    redis.call('PEXPIRE', key, expiry)
  end
end
return now
