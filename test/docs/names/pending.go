package names

// Pending are names of which the document says what the agents will have, by list. Those that are there already must be removed.
var Pending = map[string][]string{}
