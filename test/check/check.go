// Package check has what the tests of many folders do: they end at an error, and wait for what another goroutine or process does.
package check

import (
	"errors"
	"flag"
	"strconv"
	"testing"
	"time"
)

// NoError ends the test if one of the errors is not nil.
func NoError(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// limit is for anything that has to happen, on a machine under load.
const limit = 2 * time.Minute

// Until waits until ok returns true. It ends the test if that takes too long.
func Until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	Within(t, limit, what, ok)
}

// Within is Until with a limit.
func Within(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, limit)
		}
	}
}

// Parallel has n tests run at once, unless the flag of go test has a number: for tests that wait more than they compute. A TestMain calls it.
func Parallel(n int) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f != nil && f.Value.String() == f.DefValue {
		_ = f.Value.Set(strconv.Itoa(n))
	}
}
