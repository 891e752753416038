-- What all tenants keep in this Redis: see `redis.shares`.
--
-- KEYS  1 sorted set, all scores 0: tenant|last use (µs, 16 digits)|object, so a tenant's are oldest
--         first
--       2 hash: tenant|object -> bytes|last use; and total
--       3 sorted set: tenant|object -> when it expires (ms)
--       4 sorted set: tenant -> bytes
-- ARGV  bytes that all may keep (0: no bound), bytes to free now, the tenant they are for, number of
--       tenants; of each of these its name and its quotas in bytes and in objects (0: none); then
--       changes: tenant, object, bytes (0: it is gone; -1: as it was, and used now), time to live (ms)
-- Reply: tenant, object, … that must go, oldest first; they count until they are told to be gone, so
-- what a gateway that dies does not delete is named again.
-- All changes are absolute, so a repetition changes nothing.

local ORDER, OBJECTS, ENDS, TENANTS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local MAX_NAMED, MAX_EXPIRED = 64, 256
local max_bytes, room, asker = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local first_change = 5 + 3 * tonumber(ARGV[4])
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function known(name)
  local text = redis.call('HGET', OBJECTS, name)
  if text then
    local bytes, used = string.match(text, '^(%d+)|(%d+)$')
    return tonumber(bytes), used
  end
end

local function split(name)
  return string.match(name, '^([^|]*)|(.*)$')
end

local function ordered(tenant, used, object)
  return tenant .. '|' .. used .. '|' .. object
end

local function range(tenant)
  return '[' .. tenant .. '|', '(' .. tenant .. '}'
end

local function bytes_of(tenant)
  return tonumber(redis.call('ZSCORE', TENANTS, tenant) or 0)
end

local function add(tenant, bytes)
  redis.call('HINCRBY', OBJECTS, 'total', bytes)
  redis.call('ZINCRBY', TENANTS, bytes, tenant)
end

local function forget(name)
  local bytes, used = known(name)
  if bytes then
    local tenant, object = split(name)
    -- Deletions first: a full Redis permits the rest after them.
    redis.call('HDEL', OBJECTS, name)
    redis.call('ZREM', ENDS, name)
    redis.call('ZREM', ORDER, ordered(tenant, used, object))
    add(tenant, -bytes)
    local first, last = range(tenant)
    if redis.call('ZLEXCOUNT', ORDER, first, last) == 0 then
      redis.call('ZREM', TENANTS, tenant)
    end
  end
end

local function note(tenant, object, bytes, ttl_ms)
  local name = tenant .. '|' .. object
  now_us = now_us + 1 -- changes are told in the order of use
  local now = string.format('%016.0f', now_us)
  local before, used = known(name)
  if bytes < 0 then
    if not before then
      return
    end
    bytes = before
  end
  if before then
    redis.call('ZREM', ORDER, ordered(tenant, used, object))
  end
  redis.call('HSET', OBJECTS, name, string.format('%.0f|%s', bytes, now))
  if ttl_ms > 0 then
    redis.call('ZADD', ENDS, now_ms + ttl_ms, name)
  end
  redis.call('ZADD', ORDER, 0, ordered(tenant, now, object))
  add(tenant, bytes - (before or 0))
end

local named, is_named = {}, {}

-- Name a tenant's oldest objects until it has lost so many of them and so many bytes.
local function name_oldest(tenant, num, bytes)
  local first, last = range(tenant)
  for _, member in ipairs(
    redis.call('ZRANGEBYLEX', ORDER, first, last, 'LIMIT', 0, MAX_NAMED)) do
    if num <= 0 and bytes <= 0 then
      return
    end
    local object = string.sub(member, #tenant + 19)
    local name = tenant .. '|' .. object
    num, bytes = num - 1, bytes - known(name)
    if not is_named[name] then
      is_named[name] = true
      named[#named + 1], named[#named + 2] = tenant, object
    end
  end
end

for _, name in ipairs(
  redis.call('ZRANGEBYSCORE', ENDS, '-inf', now_ms, 'LIMIT', 0, MAX_EXPIRED)) do
  forget(name)
end
for place = first_change, #ARGV, 4 do
  local tenant, object, bytes = ARGV[place], ARGV[place + 1], tonumber(ARGV[place + 2])
  if bytes == 0 then
    forget(tenant .. '|' .. object)
  else
    note(tenant, object, bytes, tonumber(ARGV[place + 3]))
  end
end

for place = 5, first_change - 1, 3 do
  local tenant, num_bytes, num_objects = ARGV[place], ARGV[place + 1], ARGV[place + 2]
  local bytes_over, num_over = 0, 0
  if num_bytes ~= '0' then
    bytes_over = bytes_of(tenant) - num_bytes
  end
  if num_objects ~= '0' then
    local first, last = range(tenant)
    num_over = redis.call('ZLEXCOUNT', ORDER, first, last) - num_objects
  end
  name_oldest(tenant, num_over, bytes_over)
end

local total = tonumber(redis.call('HGET', OBJECTS, 'total') or 0)
local num_tenants = redis.call('ZCARD', TENANTS)
if num_tenants == 0 then
  redis.call('DEL', OBJECTS)
end
if asker ~= '' and not redis.call('ZSCORE', TENANTS, asker) then
  num_tenants = num_tenants + 1
end
local bound = max_bytes
if room > 0 then
  bound = math.max(1, total - room)
end
-- One tenant alone in a full Redis is refused, as by any Redis that evicts nothing.
if #named == 0 and num_tenants > 1 and bound > 0 and total > bound then
  local furthest = redis.call('ZREVRANGE', TENANTS, 0, 0, 'WITHSCORES')
  local over_share = tonumber(furthest[2]) - bound / num_tenants
  name_oldest(furthest[1], 0, math.min(total - bound, over_share))
end
return named
