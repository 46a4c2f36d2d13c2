// Package setting has the error of an invalid setting, which the core and the configuration return.
package setting

import "fmt"

// Error is one invalid setting of a configuration.
type Error struct {
	Key    string // the key as spelled where it was set: in the file, the flag or the variable
	Value  string // the value that was set; "" if none was
	Remedy string // the valid values, or what to change
}

// Error returns key, value and remedy in one line.
func (e *Error) Error() string {
	return fmt.Sprintf("%s = %q: %s", e.Key, e.Value, e.Remedy)
}
