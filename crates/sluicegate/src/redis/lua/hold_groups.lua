
-- Holds: the formats of records, indexes and answers (see hold.lua), the bounds, and the groups of the plan.
local NOT_HELD, HELD, REPEATED, RENEWED, SETTLED, ALREADY, LATE, UNKNOWN, CONFLICT, FULL = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
local SETTLE, RENEW, REVERT, HOLD_NEW = 4, 5, 6, 7
local KEEP, RELEASE = 4, 8 -- bits of the flags
local RETENTION, MAX_LIVE, MAX_RELEASED = 60000000, 100000, '16'
-- The longest time until a new hold is removed from its index, and ten minutes by which the clock may be set back after that.
local MAX_REMOVAL_DELAY = 86400000000 + RETENTION + 600000000
local HOLD, HOLD_BYTES, MEMBER, MEMBER_BYTES = '<BBddddddd', 58, '<Bdd', 17
local RESULT = '<BI4ddd'

-- Returns whether the script can have stored this limit.
local function is_stored_limit(limit)
  return are_stored(limit.amount, limit.window, limit.capacity, limit.phase, limit.units) and limit.micros > 0
    and (limit.window > 0 or limit.code == CONCURRENCY)
end

-- Reads the tiers of a group with holds. Its checks begin at `position`.
local function read_held_group(group, position)
  local limit
  group.excess, group.limit_texts = {}, {}
  position = position + 4
  for tier = 1, group.tiers do
    group.flags[tier], limit, group.excess[tier], position = unpack_from(TIER, plan, position)
    group.terms[tier] = limits[limit]
    group.limit_texts[tier] = string.sub(ARGV[2], (limit - 1) * LIMIT_BYTES + 1, limit * LIMIT_BYTES)
  end
  group.position = position
end

-- Reads the next check of a group with holds, and overwrites the previous one. `fields` has the same layout as in other groups; `indexes`
-- and `records` contain the keys of each tier at the same positions.
local function read_held_check(group, position)
  local fields, indexes, records = {}, {}, {}
  local count, ttl, id
  count, ttl, id, position = unpack_from('<I4dHc0', plan, position)
  for tier = 1, group.tiers do
    local place = 1 + tier
    group.costs[tier], fields[place], indexes[place], records[place], position = unpack_from('<dHHH', plan, position)
    if indexes[place] == 0 then
      indexes[place] = fields[place]
    end
  end
  fields[1] = count
  group.fields, group.indexes, group.records, group.ttls, group.ids = fields, indexes, records, { ttl }, { id }
end
