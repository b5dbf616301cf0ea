-- A sign of life of one router, with what it has on its way to workers; back come those of the others.
-- Who says nothing for as long as its life lasts, by Redis's clock, is forgotten with all it had reserved.
--
-- What is set once and never changes tells whether Redis has lost its memory.
--
-- KEYS: ends (sorted set: router -> end), words (hash: router -> what it says), memory
-- ARGV: router, what it says, its life in ms
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('SET', KEYS[3], ARGV[1] .. ':' .. now, 'NX')
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('HDEL', KEYS[2], gone)
end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return {now, redis.call('GET', KEYS[3]), redis.call('HGETALL', KEYS[2])}
