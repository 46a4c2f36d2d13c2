package importer

// Value is a value of an input, with the values in it.
type Value struct {
	ID    any    // the parser's node
	Where string // "values.yaml:3: config.default"
	In    []Value
}

// Account has what an import makes of each value of its input: what is said of a value holds for those in it, unless something else is said of
// them. The zero value is that of an import that has read nothing.
type Account struct {
	effects map[any]Effect
}

// Set says what an import makes of a value.
func (a *Account) Set(id any, effect Effect) {
	if a.effects == nil {
		a.effects = map[any]Effect{}
	}
	a.effects[id] = effect
}

// Has reports whether something is said of a value itself.
func (a *Account) Has(id any) bool {
	_, ok := a.effects[id]
	return ok
}

// Open returns the largest values within v, or v itself, of which nothing is said.
func (a *Account) Open(v Value) []Value {
	all, _ := a.open(v)
	return all
}

// open also reports whether nothing is said of any value in v.
func (a *Account) open(v Value) (all []Value, whole bool) {
	if a.Has(v.ID) {
		return nil, false
	}
	whole = true
	for _, in := range v.In {
		more, open := a.open(in)
		all, whole = append(all, more...), whole && open
	}
	if whole {
		return []Value{v}, true
	}
	return all, false
}

// Leaves returns the places of the values in v that have no values in them and of which the account says effect.
func (a *Account) Leaves(v Value, effect Effect) []string { return a.leaves(v, effect, "") }

func (a *Account) leaves(v Value, want, inherited Effect) (places []string) {
	effect, known := a.effects[v.ID]
	if !known {
		effect = inherited
	}
	if len(v.In) == 0 && effect == want {
		return []string{v.Where}
	}
	for _, in := range v.In {
		places = append(places, a.leaves(in, want, effect)...)
	}
	return places
}

// Understood reports whether the account says something of a value in v but that it is unknown; true if v has no value.
func (a *Account) Understood(v Value) bool {
	for _, effect := range []Effect{Taken, Differs, Needed, NoEffect} {
		if len(a.Leaves(v, effect)) > 0 {
			return true
		}
	}
	return len(a.Leaves(v, Unknown)) == 0
}
