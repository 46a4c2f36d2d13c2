package reset

// MaxBytes is the size of the text of a state.
const MaxBytes = 1 << 20

// Encode returns the text of a state.
func (s State) Encode() ([]byte, error) { return nil, nil }

// Parse reads a state. It fails if the text is of another program or version: then nothing is known.
func Parse(text []byte) (State, error) { return State{}, nil }
