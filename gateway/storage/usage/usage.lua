-- Adds records to the sums of their days, each once.
--
-- KEYS: for each record, what was recorded under its id, and the sums of its day
-- ARGV: milliseconds for which the sums are kept; the names of the counts, separated by spaces;
--       then for each record its epoch, its milliseconds to live, its tenant and key, its counts
local names = {}
for name in string.gmatch(ARGV[2], '%S+') do names[#names + 1] = name end

local function add(day, owner, counts, sign)
    for place, name in ipairs(names) do
        if counts[place] ~= '0' then
            redis.call('HINCRBY', day, owner .. '\n' .. name, sign .. counts[place])
        end
    end
end

local at = 3
for number = 1, #KEYS, 2 do
    local id, day = KEYS[number], KEYS[number + 1]
    local epoch, ttl_ms, owner = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 2]
    local counts = {}
    for place = 1, #names do counts[place] = ARGV[at + 2 + place] end
    at = at + 3 + #names
    local known = redis.call('GET', id)
    known = known and cjson.decode(known)
    if not known or known.epoch <= epoch then
        if known then add(known.day, known.owner, known.counts, '-') end
        add(day, owner, counts, '')
        redis.call('PEXPIRE', day, ARGV[1])
        local record = {epoch = epoch, day = day, owner = owner, counts = counts}
        redis.call('SET', id, cjson.encode(record), 'PX', ttl_ms)
    end
end
