-- An effect and its record. In front of the plan of the caller, which sees its own keys and arguments, and a `redis` that
-- reads. It has no flags, so that a full server answers what is known and refuses the first write alone.
local plan = function(KEYS, ARGV, redis)
