-- The listed conversations of one tenant, by the time of their last turn, then by id.
--
-- KEYS: the index, of all or of those that are pinned. ARGV: operation, time to live (ms), then the operation's arguments.

local INDEX = KEYS[1]
local operation, ttl_ms = ARGV[1], ARGV[2]

local operations = {}

-- Not to an earlier time than it has: turns end in any order, and operations are repeated.
function operations.add(used_at, conversation)
  local known = redis.call('ZSCORE', INDEX, conversation)
  if not known or tonumber(known) < tonumber(used_at) then
    redis.call('ZADD', INDEX, used_at, conversation)
  end
  return {'ok'}
end

function operations.remove(...)
  redis.call('ZREM', INDEX, ...)
  return {'ok'}
end

function operations.page(after, count, newest_first)
  local rank_of, range = 'ZRANK', 'ZRANGE'
  if newest_first == '1' then
    rank_of, range = 'ZREVRANK', 'ZREVRANGE'
  end
  local start = 0
  if after ~= '' then
    local rank = redis.call(rank_of, INDEX, after)
    if not rank then
      return {'no conversation'}
    end
    start = rank + 1
  end
  return {'ok', unpack(redis.call(range, INDEX, start, start + count - 1, 'WITHSCORES'))}
end

local reply = operations[operation](unpack(ARGV, 3))
redis.call('PEXPIRE', INDEX, ttl_ms)
return reply
