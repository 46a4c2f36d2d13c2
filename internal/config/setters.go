package config

import (
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/schema"
)

// custom is a binding with a setter of its own; only for types that no function below has.
func custom(t schema.Type, set setter) binding { return binding{Type: t, set: set} }

// oneOf sets one of the values.
func oneOf[T ~string](field *T, values ...T) binding {
	texts := make([]string, len(values))
	for i, value := range values {
		texts[i] = string(value)
	}
	return custom(schema.OneOf(texts...), func(v Value) error {
		if *field = T(v.Text); slices.Contains(values, *field) {
			return nil
		}
		return errors.New("want " + document.Choice(texts))
	})
}

// choice sets the value that has the text as its name.
func choice[T any](field *T, values map[string]T) binding {
	names := slices.Sorted(maps.Keys(values))
	return custom(schema.OneOf(names...), func(v Value) error {
		value, ok := values[v.Text]
		if !ok {
			return errors.New("want " + document.Choice(names))
		}
		*field = value
		return nil
	})
}

// known adds an item of a list that has one of the names.
func known(field *[]string, names []string) binding {
	return binding{Type: commaList(schema.OneOf(names...)), setItem: func(item string) error {
		if !slices.Contains(names, item) {
			return errors.New("want " + document.Choice(names))
		}
		if !slices.Contains(*field, item) {
			*field = append(*field, item)
			slices.Sort(*field)
		}
		return nil
	}}
}

// commaList is the type of a list that may be a text with commas.
func commaList(item schema.Type) schema.Type {
	t := schema.ListOf(item, 0)
	t.Lenient = true
	return t
}

// absolutePath is the type of a path.
var absolutePath = schema.Match("^/", "an absolute path")

// path sets an absolute path.
func path(field *string, example string) binding {
	return custom(absolutePath, func(v Value) error {
		if *field = v.Text; !filepath.IsAbs(v.Text) {
			return errors.New("want an absolute path such as " + example)
		}
		return nil
	})
}

// pathOrEmpty sets an absolute path, or none.
func pathOrEmpty(field *string, example string) binding { return orEmpty(field, path(field, example)) }

// orEmpty sets "", or a value by another binding.
func orEmpty[T ~string](field *T, b binding) binding {
	t := b.Type
	t.Blank = true
	return custom(t, func(v Value) error {
		if v.Text == "" {
			*field = ""
			return nil
		}
		return b.set(v)
	})
}

func boolean(field *bool) binding {
	return custom(schema.Type{Kind: schema.Bool, Lenient: true}, func(v Value) (err error) {
		if *field, err = strconv.ParseBool(v.Text); err != nil {
			return errors.New("want true or false")
		}
		return nil
	})
}

// count sets a number of 1 or more.
func count(field *int) binding {
	t := schema.Int(1, 0)
	t.Lenient = true
	return custom(t, func(v Value) (err error) {
		if *field, err = strconv.Atoi(v.Text); err != nil || *field < t.Min {
			return errors.New("want a number of 1 or more")
		}
		return nil
	})
}

// durations are the texts of time.ParseDuration above 0: a digit other than 0 is required in the last number or in one before it.
const durations = `^\+?([0-9.]+(ns|us|µs|μs|ms|s|m|h))*[0-9.]*[1-9][0-9.]*(ns|us|µs|μs|ms|s|m|h)([0-9.]+(ns|us|µs|μs|ms|s|m|h))*$`

// duration sets a positive duration of at least least.
func duration(field *time.Duration, least time.Duration) binding {
	words := "a duration"
	if least > 0 {
		words += " of " + least.String() + " or more"
	}
	return custom(schema.Match(durations, words), func(v Value) (err error) {
		switch *field, err = time.ParseDuration(v.Text); {
		case err != nil || *field <= 0 && least == 0:
			return errors.New("want a positive duration such as 30s or 1m")
		case *field < least:
			return errors.New("want " + least.String() + " or more")
		}
		return nil
	})
}
