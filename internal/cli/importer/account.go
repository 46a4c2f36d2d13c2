package importer

// Value is a value of an input, with the values in it.
type Value struct {
	ID    any    // the parser's node
	Where string // "values.yaml:3: config.default"
	In    []Value
}

// Account has the effect of each value of an input on the result of the import: the effect of a value is also that of the values in it, unless they have
// their own. The zero value is that of an import that has read nothing.
type Account struct {
	effects map[any]Effect
}

// Set records the effect of a value.
func (a *Account) Set(id any, effect Effect) {
	if a.effects == nil {
		a.effects = map[any]Effect{}
	}
	a.effects[id] = effect
}

// Has reports whether a value has an effect of its own.
func (a *Account) Has(id any) bool {
	_, ok := a.effects[id]
	return ok
}

// Open returns the largest values within v, or v itself, that have no recorded effect.
func (a *Account) Open(v Value) []Value {
	all, _ := a.open(v)
	return all
}

// open also reports whether no value in v has a recorded effect.
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

// Leaves returns the places of the values in v that have no values in them and have this effect.
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

// Understood reports whether a value in v has a recorded effect other than Unknown; true if v has no value.
func (a *Account) Understood(v Value) bool {
	for _, effect := range []Effect{Taken, Differs, Needed, NoEffect} {
		if len(a.Leaves(v, effect)) > 0 {
			return true
		}
	}
	return len(a.Leaves(v, Unknown)) == 0
}
