-- A tenant's limits, shared by all gateways: see `redis_quotas`.
--
-- KEYS  1 hash: requests, tokens (used of each bucket, draining), at (ms of the server's clock)
--       2 sorted set: hold -> when its lease ends (ms)
-- ARGV  action, then
--   reserve  hold, tokens, lease (ms), limits: requests, tokens, at once (0: none)
--            -> granted (1, 0), used requests, used tokens (as text), number running
--   settle   hold, requests and tokens to return, limits of both (0: none)
--   renew    lease (ms), holds…
-- All are idempotent: a hold is neither reserved nor returned twice.

local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
local buckets, holds = KEYS[1], KEYS[2]

local function used(name, limit)
  local level = tonumber(redis.call('HGET', buckets, name) or '0')
  local at = tonumber(redis.call('HGET', buckets, 'at') or now)
  if limit <= 0 then return 0 end
  return math.max(0, level - math.max(0, now - at) * limit / 60000)
end

local function keep(requests, tokens, request_limit, token_limit)
  redis.call('HSET', buckets, 'requests', tostring(requests), 'tokens', tostring(tokens), 'at', now)
  local drained = 0
  if request_limit > 0 then drained = requests / request_limit end
  if token_limit > 0 then drained = math.max(drained, tokens / token_limit) end
  redis.call('PEXPIRE', buckets, math.ceil(drained * 60000) + 60000)
end

local action = ARGV[1]
if action == 'reserve' then
  local hold, cost, lease = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
  local request_limit, token_limit = tonumber(ARGV[5]), tonumber(ARGV[6])
  local at_once = tonumber(ARGV[7])
  redis.call('ZREMRANGEBYSCORE', holds, '-inf', now)
  local requests, tokens = used('requests', request_limit), used('tokens', token_limit)
  local running = redis.call('ZCARD', holds)
  local granted = redis.call('ZSCORE', holds, hold) and true or false
  if not granted then
    -- A request that costs more than a full bucket is admitted by a full one; the rest is a debt.
    granted = (request_limit <= 0 or requests + 1 <= request_limit + 1e-6)
      and (token_limit <= 0 or tokens + math.min(cost, token_limit) <= token_limit + 1e-6)
      and (at_once <= 0 or running < at_once)
    if granted then
      requests, tokens, running = requests + 1, tokens + cost, running + 1
      keep(requests, tokens, request_limit, token_limit)
      redis.call('ZADD', holds, now + lease, hold)
      redis.call('PEXPIRE', holds, lease)
    end
  end
  return { granted and 1 or 0, tostring(requests), tostring(tokens), running }
elseif action == 'settle' then
  if redis.call('ZREM', holds, ARGV[2]) == 1 then
    local request_limit, token_limit = tonumber(ARGV[5]), tonumber(ARGV[6])
    local requests = math.max(0, used('requests', request_limit) - tonumber(ARGV[3]))
    local tokens = math.max(0, used('tokens', token_limit) - tonumber(ARGV[4]))
    keep(requests, tokens, request_limit, token_limit)
  end
  return 1
else
  local lease = tonumber(ARGV[2])
  for place = 3, #ARGV do
    redis.call('ZADD', holds, 'XX', now + lease, ARGV[place])
  end
  redis.call('PEXPIRE', holds, lease)
  return 1
end
