package config

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/config/document"
)

// oneOf sets one of the values.
func oneOf[T ~string](field *T, values ...T) setter {
	return func(v Value) error {
		if *field = T(v.Text); slices.Contains(values, *field) {
			return nil
		}
		texts := make([]string, len(values))
		for i, value := range values {
			texts[i] = string(value)
		}
		return errors.New("want " + document.Choice(texts))
	}
}

// choice sets the value that has the text as its name.
func choice[T any](field *T, values map[string]T) setter {
	return func(v Value) error {
		value, ok := values[v.Text]
		if !ok {
			return errors.New("want " + document.Choice(slices.Sorted(maps.Keys(values))))
		}
		*field = value
		return nil
	}
}

// only accepts a list of the one supported value; the others are known.
func only(supported string, known ...string) setter {
	return func(v Value) error {
		items := v.items()
		for _, item := range items {
			if slices.Contains(known, item) {
				return fmt.Errorf("%s is not supported by this version: want %s", item, supported)
			}
		}
		if len(items) == 0 || slices.ContainsFunc(items, func(item string) bool { return item != supported }) {
			return errors.New("want " + supported)
		}
		return nil
	}
}

// path sets an absolute path.
func path(field *string, example string) setter {
	return func(v Value) error {
		if *field = v.Text; !filepath.IsAbs(v.Text) {
			return errors.New("want an absolute path such as " + example)
		}
		return nil
	}
}

// pathOrEmpty sets an absolute path, or none.
func pathOrEmpty(field *string, example string) setter { return orEmpty(field, path(field, example)) }

// orEmpty sets "", or a value by another setter.
func orEmpty[T ~string](field *T, set setter) setter {
	return func(v Value) error {
		if v.Text == "" {
			*field = ""
			return nil
		}
		return set(v)
	}
}

func boolean(field *bool) setter {
	return func(v Value) (err error) {
		if *field, err = strconv.ParseBool(v.Text); err != nil {
			return errors.New("want true or false")
		}
		return nil
	}
}

// count sets a number of 1 or more.
func count(field *int) setter {
	return func(v Value) (err error) {
		if *field, err = strconv.Atoi(v.Text); err != nil || *field < 1 {
			return errors.New("want a number of 1 or more")
		}
		return nil
	}
}

// duration sets a positive duration of at least least.
func duration(field *time.Duration, least time.Duration) setter {
	return func(v Value) (err error) {
		switch *field, err = time.ParseDuration(v.Text); {
		case err != nil || *field <= 0 && least == 0:
			return errors.New("want a positive duration such as 30s or 1m")
		case *field < least:
			return errors.New("want " + least.String() + " or more")
		}
		return nil
	}
}
