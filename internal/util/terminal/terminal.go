// Package terminal finds out whether a file is a terminal, and how large it is.
package terminal

import (
	"os"

	"golang.org/x/sys/unix"
)

// Is reports whether a file is a terminal (isatty(3)).
func Is(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS) //nolint:gosec // a file descriptor is an int
	return err == nil
}

// Size returns the columns and rows of a terminal (TIOCGWINSZ). It returns false if f is no terminal, or one of unknown size, as
// "kubectl exec -t" makes it for a moment.
func Size(f *os.File) (columns, rows int, ok bool) {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ) //nolint:gosec // a file descriptor is an int
	if err != nil || size.Col == 0 || size.Row == 0 {
		return 0, 0, false
	}
	return int(size.Col), int(size.Row), true
}
