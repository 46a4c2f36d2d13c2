package core

import "fmt"

// ConfigError is one thing wrong with a configuration, in the words of the one who wrote it.
type ConfigError struct {
	Key    string // as it is spelled where it was set
	Value  string // as it was given; "" if none was
	Remedy string // what to write instead
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("%s = %q: %s", e.Key, e.Value, e.Remedy)
}
