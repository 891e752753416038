-- All operations on one conversation, each of them atomic.
--
-- KEYS: its fields, the links of its turns, their bodies, chunks of token ids; all in one slot.
-- ARGV: operation, tenant, time to live (ms), lease (ms), then the operation's arguments.
-- Replies: {"ok", bytes of the conversation, …}, {"no conversation"}, {"no turn"}, {"locked"} or
-- {"too large", the bound}. '' stands for no value.

local FIELDS, LINKS, BODIES, CHUNKS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local operation, tenant, ttl_ms, lease_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- As in memory: objects and slots, without their content.
local TREE_BYTES, TURN_BYTES, CHUNK_BYTES = 1024, 512, 128

local function field(name)
  return redis.call('HGET', FIELDS, name) or ''
end

local function set(...)
  redis.call('HSET', FIELDS, ...)
end

-- Bytes of the whole conversation, kept in a field; counted where it is missing.
local function counted()
  local num = TREE_BYTES
  for key, overhead in pairs({[BODIES] = TURN_BYTES, [CHUNKS] = CHUNK_BYTES}) do
    for _, value in ipairs(redis.call('HVALS', key)) do
      num = num + overhead + #value
    end
  end
  return num
end

local num_bytes = tonumber(field('num_bytes')) or counted()
local num_bytes_before = num_bytes

local function count(num)
  num_bytes = num_bytes + num
end

-- A link is `order|parent|status|created at|lease (ms)`: children have a higher order than parents.
local function parse(text)
  local order, parent, status, created_at, lease =
    string.match(text, '^(%d+)|([^|]*)|([^|]*)|(%d+)|(%d+)$')
  local link = {order = order, parent = parent, status = status, created_at = created_at}
  link.lease = tonumber(lease)
  link.is_running = status == 'in_progress' and link.lease > now_ms
  -- Its gateway is gone.
  link.shown = (status == 'in_progress' and not link.is_running) and 'failed' or status
  return link
end

local function link_of(turn)
  local text = redis.call('HGET', LINKS, turn)
  return text and parse(text)
end

local function put_link(turn, link)
  local lease = link.status == 'in_progress' and now_ms + lease_ms or 0
  local text = string.format(
    '%s|%s|%s|%s|%.0f', link.order, link.parent, link.status, link.created_at, lease)
  redis.call('HSET', LINKS, turn, text)
end

-- A turn's body, and the chunks of token ids that it names: name, bytes, name, bytes, …
local function put_body(turn, body, ...)
  count(#body - redis.call('HSTRLEN', BODIES, turn))
  redis.call('HSET', BODIES, turn, body)
  local chunks = {...}
  for index = 1, #chunks, 2 do
    if redis.call('HSETNX', CHUNKS, chunks[index], chunks[index + 1]) == 1 then
      count(CHUNK_BYTES + #chunks[index + 1])
    end
  end
end

local function put_turn(turn, link, ...)
  link.order = redis.call('HINCRBY', FIELDS, 'num_turns', 1)
  count(TURN_BYTES)
  put_link(turn, link)
  put_body(turn, ...)
end

-- A body begins with the number of names, 4 bytes, and the names, 16 bytes each.
local function each_chunk(body, visit)
  -- No more than fit: foreign bytes must not keep Redis busy.
  local num = math.min(struct.unpack('<I4', body), math.floor((#body - 4) / 16))
  for index = 1, num do
    visit(string.sub(body, 16 * index - 11, 16 * index + 4))
  end
end

-- Delete the chunks of a body that no other body uses.
local function drop_chunks(body)
  local is_used = {}
  for _, other in ipairs(redis.call('HVALS', BODIES)) do
    each_chunk(other, function(name) is_used[name] = true end)
  end
  each_chunk(body, function(name)
    if not is_used[name] then
      count(-CHUNK_BYTES - redis.call('HSTRLEN', CHUNKS, name))
      redis.call('HDEL', CHUNKS, name)
    end
  end)
end

-- Whether all turns from this one to the root exist.
local function is_whole(turn)
  while turn ~= '' do
    local link = link_of(turn)
    if not link then
      return false
    end
    turn = link.parent
  end
  return true
end

-- The turn that holds the head.
local function holder()
  local turn = field('running')
  local link = turn ~= '' and link_of(turn)
  return (link and link.is_running) and turn or ''
end

local function described()
  return {
    'ok', field('created_at'), field('is_listed'), field('metadata'), field('head'), holder()
  }
end

local operations = {}

function operations.create(created_at, is_listed, metadata)
  set('tenant', tenant, 'created_at', created_at, 'is_listed', is_listed, 'metadata', metadata,
    'head', '', 'running', '', 'num_turns', 0)
  count(#metadata)
  return {'ok'}
end

operations.get = described
operations.peek = described

function operations.set_metadata(metadata)
  count(#metadata - #field('metadata'))
  set('metadata', metadata)
  return described()
end

function operations.delete()
  redis.call('DEL', unpack(KEYS))
  return {'ok'}
end

-- Make room for others, unless a turn runs.
function operations.evict()
  for _, link in ipairs(redis.call('HVALS', LINKS)) do
    if parse(link).is_running then
      return {'locked'}
    end
  end
  return operations.delete()
end

-- Idempotent, like all operations: after a lost reply the client repeats them.
function operations.begin_turn(turn, parent, created_at, takes_head, ...)
  if link_of(turn) then
    return {'ok'}
  end
  if parent ~= '' and not link_of(parent) then
    return {'no turn'}
  end
  if takes_head == '1' then
    if parent ~= field('head') or holder() ~= '' then
      return {'locked'}
    end
    set('running', turn)
  end
  put_turn(turn, {parent = parent, status = 'in_progress', created_at = created_at}, ...)
  return {'ok'}
end

function operations.touch_turn(turn)
  local link = link_of(turn)
  if link and link.status == 'in_progress' then
    put_link(turn, link)
  end
  return {'ok'}
end

function operations.finish_turn(turn, status, ...)
  local link = link_of(turn)
  if link and link.status == 'in_progress' then
    link.status = status
    put_link(turn, link)
    put_body(turn, ...)
    if field('running') == turn then
      set('running', '')
      if status ~= 'failed' and is_whole(turn) then
        set('head', turn)
      end
    end
  end
  return described()
end

-- Bytes of the turns without a response.
local function added()
  local num = 0
  for _, turn in ipairs(redis.call('HKEYS', BODIES)) do
    if string.sub(turn, 1, 5) == 'turn_' then
      num = num + redis.call('HSTRLEN', BODIES, turn)
    end
  end
  return num
end

function operations.add_items(turn, created_at, max_bytes, max_added, body, ...)
  if not link_of(turn) then
    if holder() ~= '' then
      return {'locked'}
    end
    if added() + #body > tonumber(max_added) then
      return {'too large', max_added}
    end
    if max_bytes ~= '' and num_bytes + TURN_BYTES + #body > tonumber(max_bytes) then
      return {'too large', max_bytes}
    end
    local link = {parent = field('head'), status = 'completed', created_at = created_at}
    put_turn(turn, link, body, ...)
    set('head', turn, 'running', '')
  end
  return described()
end

function operations.replace_items(turn, ...)
  if not link_of(turn) then
    return {'no turn'}
  end
  put_body(turn, ...)
  return {'ok'}
end

local function append(reply, turn, link)
  for _, value in ipairs({turn, link.parent, link.shown, link.created_at}) do
    reply[#reply + 1] = value
  end
end

function operations.turn(turn)
  local link = link_of(turn)
  if not link then
    return {'no turn'}
  end
  local reply = {'ok'}
  append(reply, turn, link)
  reply[#reply + 1] = redis.call('HGET', BODIES, turn)
  return reply
end

-- From the turn to the root.
function operations.path(turn)
  local reply = {'ok'}
  while turn ~= '' do
    local link = link_of(turn)
    if not link then
      return {'no turn'}
    end
    append(reply, turn, link)
    reply[#reply + 1] = redis.call('HGET', BODIES, turn)
    turn = link.parent
  end
  return reply
end

-- In no order; each turn with its own.
function operations.tree()
  local reply = {'ok'}
  local links = redis.call('HGETALL', LINKS)
  for index = 1, #links, 2 do
    local link = parse(links[index + 1])
    append(reply, links[index], link)
    reply[#reply + 1] = link.order
  end
  return reply
end

function operations.set_head(turn, expected)
  if not is_whole(turn) then
    return {'no turn'}
  end
  if holder() ~= '' or field('head') ~= expected then
    return {'locked'}
  end
  set('head', turn, 'running', '')
  return {'ok'}
end

function operations.delete_turn(turn)
  local link = link_of(turn)
  if not link then
    return {'no turn'}
  end
  local body = redis.call('HGET', BODIES, turn)
  redis.call('HDEL', LINKS, turn)
  redis.call('HDEL', BODIES, turn)
  if body then
    count(-TURN_BYTES - #body)
    drop_chunks(body)
  end
  if field('running') == turn then
    set('running', '')
  end
  if not is_whole(field('head')) then
    set('head', is_whole(link.parent) and link.parent or '')
  end
  if field('is_listed') == '0' and redis.call('EXISTS', LINKS) == 0 then
    redis.call('DEL', FIELDS)
  end
  return {'ok'}
end

local owner = redis.call('HGET', FIELDS, 'tenant')
if operation == 'create' then
  if owner then
    return {'ok'}
  end
elseif owner ~= tenant then
  return {'no conversation'}
end
local reply = operations[operation](unpack(ARGV, 5))
if reply[1] == 'ok' then
  if redis.call('EXISTS', FIELDS) == 0 then
    num_bytes = 0
  elseif num_bytes ~= num_bytes_before then
    set('num_bytes', num_bytes)
  end
  table.insert(reply, 2, num_bytes)
end
if operation ~= 'peek' then
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, ttl_ms)
  end
end
return reply
