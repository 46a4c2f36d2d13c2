package core

import "fmt"

// ConfigError is one invalid setting of a configuration.
type ConfigError struct {
	Key    string // the key as spelled where it was set: in the file, the flag or the variable
	Value  string // the value that was set; "" if none was
	Remedy string // the valid values, or what to change
}

// Error returns key, value and remedy in one line.
func (e *ConfigError) Error() string {
	return fmt.Sprintf("%s = %q: %s", e.Key, e.Value, e.Remedy)
}
