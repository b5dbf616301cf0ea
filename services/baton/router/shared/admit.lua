-- Admit one request, or say what stands against it and for how long. One atomic step, on Redis's own clock.
--
-- A sliding window in buckets: exact but for the oldest bucket, which counts until all of it has left. Unlike a
-- leaky bucket (GCRA) it never lets a burst and the refill of the same minute pass, and what was reserved and
-- not used can be given back to the moment it was taken from.
--
-- KEYS: requests, tokens (hashes: bucket -> amount), leases (sorted set: lease -> end), days (hash: day -> tokens)
-- ARGV: the four limits (-1: none), tokens, lease, its life, bucket and window, all times in ms
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local limits = {tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])}
local tokens, lease, life = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local width, window = tonumber(ARGV[8]), tonumber(ARGV[9])
local DAY = 86400000
local bucket, day = math.floor(now / width), math.floor(now / DAY)
local oldest = math.floor((now - window) / width)

local function left_in(b)
  return (b + 1) * width + window - now
end

-- The sum of a window, the time until it is empty, and the time until amount fits (-1: never).
local function look(key, amount, limit)
  local flat, sum, newest, buckets = redis.call('HGETALL', key), 0, nil, {}
  for i = 1, #flat, 2 do
    local b, used = tonumber(flat[i]), tonumber(flat[i + 1])
    if b < oldest then
      redis.call('HDEL', key, flat[i])
    elseif used > 0 then
      sum = sum + used
      buckets[#buckets + 1] = {b, used}
      if newest == nil or b > newest then newest = b end
    end
  end
  local reset = newest and left_in(newest) or 0
  local excess = sum + amount - limit
  if limit < 0 or excess <= 0 then return sum, reset, 0 end
  table.sort(buckets, function(x, y) return x[1] < y[1] end)
  for _, each in ipairs(buckets) do
    excess = excess - each[2]
    if excess <= 0 then return sum, reset, math.max(1, left_in(each[1])) end
  end
  return sum, reset, -1
end

local requests, requests_reset, w1 = look(KEYS[1], 1, limits[1])
local used, tokens_reset, w2 = look(KEYS[2], tokens, limits[2])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
local w3 = (limits[3] >= 0 and redis.call('ZCARD', KEYS[3]) >= limits[3]) and 1000 or 0
local today = tonumber(redis.call('HGET', KEYS[4], day) or '0')
local w4 = (limits[4] >= 0 and today + tokens > limits[4]) and DAY - now % DAY or 0
if limits[4] >= 0 and tokens > limits[4] then w4 = -1 end

-- The first that is against it; one that is so for ever before all others.
local refused, wait = 0, 0
for i, w in ipairs({w1, w2, w3, w4}) do
  if w ~= 0 and wait >= 0 then
    if refused == 0 or w < 0 then refused = i end
    wait = w < 0 and -1 or math.max(wait, w)
  end
end
if refused == 0 then
  redis.call('HINCRBY', KEYS[1], bucket, 1)
  redis.call('HINCRBY', KEYS[2], bucket, tokens)
  redis.call('PEXPIRE', KEYS[1], window + 2 * width)
  redis.call('PEXPIRE', KEYS[2], window + 2 * width)
  redis.call('ZADD', KEYS[3], now + life, lease)
  redis.call('PEXPIRE', KEYS[3], life)
  redis.call('HINCRBY', KEYS[4], day, tokens)
  redis.call('HDEL', KEYS[4], day - 1, day - 2)
  redis.call('PEXPIRE', KEYS[4], 2 * DAY)
  requests, used = requests + 1, used + tokens
  requests_reset, tokens_reset = left_in(bucket), left_in(bucket)
end
return {refused, wait, requests, requests_reset, used, tokens_reset, now, bucket}
