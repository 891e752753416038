-- Compare what a gateway has seen of a conversation, and store what it makes of it (`tree.py`).
--
-- KEYS: its fields, the links of its turns, their bodies, chunks of token ids; all in one slot.
-- ARGV: the state that the gateway has seen, tenant, time to live (ms; '' leaves it), what to read
-- (see below), the turn to read, then writes: number of the key, name, value; a negative number
-- deletes the name, 0 the whole conversation. The state is '' for reading alone, 'new' to create.
-- Reply: 1 if the state was the one seen, and the writes are done, otherwise 0; the state now; the
-- time (ms); bodies. With 0 also: fields; links, each with the size of its body; sizes of chunks.

local FIELDS, LINKS, BODIES, CHUNKS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local seen, tenant, ttl_ms, what, turn = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

-- The version, and what gateways that know of no version change.
local function state()
  local values = redis.call('HMGET', FIELDS, 'version', 'num_turns', 'head', 'running')
  for index = 1, 4 do
    values[index] = values[index] or ''
  end
  return table.concat(values, '|')
end

local owner = redis.call('HGET', FIELDS, 'tenant')
if owner and owner ~= tenant or not owner and seen ~= 'new' then
  return {}
end
local is_same = seen == (owner and state() or 'new')
if is_same then
  for index = 6, #ARGV, 3 do
    local number = tonumber(ARGV[index])
    if number == 0 then
      redis.call('DEL', unpack(KEYS))
    elseif number > 0 then
      redis.call('HSET', KEYS[number], ARGV[index + 1], ARGV[index + 2])
    else
      redis.call('HDEL', KEYS[-number], ARGV[index + 1])
    end
  end
  if #ARGV > 5 and redis.call('EXISTS', FIELDS) == 1 then
    redis.call('HINCRBY', FIELDS, 'version', 1)
  end
end

-- `turn`: its body. `path`: those from the turn to the root. `all`: of all turns.
local bodies = {}
if what == 'all' then
  bodies = redis.call('HGETALL', BODIES)
elseif what == 'turn' or what == 'path' then
  for _ = 1, redis.call('HLEN', LINKS) do  -- foreign links may lead in a circle
    local link = redis.call('HGET', LINKS, turn)
    if not link then
      break
    end
    table.insert(bodies, turn)
    table.insert(bodies, redis.call('HGET', BODIES, turn))
    turn = string.match(link, '^%d+|([^|]*)') or ''
    if what == 'turn' then
      break
    end
  end
end

local time = redis.call('TIME')
local reply = {is_same and 1 or 0, state(), time[1] * 1000 + math.floor(time[2] / 1000), bodies}
if not is_same then
  local links, chunks = {}, {}
  local turns = redis.call('HKEYS', LINKS)
  if what == 'brief' then
    turns = redis.call('HMGET', FIELDS, 'running')
  end
  for _, name in ipairs(turns) do
    local link = name and redis.call('HGET', LINKS, name)
    if link then
      table.insert(links, name)
      table.insert(links, link)
      table.insert(links, redis.call('HSTRLEN', BODIES, name))
    end
  end
  for _, name in ipairs(what == 'brief' and {} or redis.call('HKEYS', CHUNKS)) do
    table.insert(chunks, name)
    table.insert(chunks, redis.call('HSTRLEN', CHUNKS, name))
  end
  reply[5], reply[6], reply[7] = redis.call('HGETALL', FIELDS), links, chunks
end
if ttl_ms ~= '' then
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, ttl_ms)
  end
end
return reply
