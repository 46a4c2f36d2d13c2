// Package wire compares the wire format of internal/kubeadapter/kubeapi with the types of k8s.io/api.
package wire

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// Every field of kubeapi's types is one of the API's types, of the same form, and comes back as it was: an unknown field is an error.
func TestFieldsAreThoseOfTheAPI(t *testing.T) {
	for name, c := range map[string]struct{ own, api any }{
		"slice":  {&kubeapi.ResourceSlice{}, &resourcev1.ResourceSlice{}},
		"slices": {&kubeapi.SliceList{}, &resourcev1.ResourceSliceList{}},
		"claim":  {&kubeapi.ResourceClaim{}, &resourcev1.ResourceClaim{}},
		"node":   {&kubeapi.Node{}, &corev1.Node{}},
		"class":  {&kubeapi.DeviceClass{}, &resourcev1.DeviceClass{}},
	} {
		t.Run(name, func(t *testing.T) {
			fields := fill(t, reflect.ValueOf(c.own).Elem())
			sent, err := json.Marshal(c.own)
			if err != nil {
				t.Fatal(err)
			}
			strict := json.NewDecoder(bytes.NewReader(sent))
			strict.DisallowUnknownFields()
			if err := strict.Decode(c.api); err != nil {
				t.Fatalf("%v\n%s", err, sent)
			}
			stored, err := json.Marshal(c.api)
			if err != nil {
				t.Fatal(err)
			}
			got := reflect.New(reflect.TypeOf(c.own).Elem())
			if err := json.Unmarshal(stored, got.Interface()); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.own, got.Interface()); diff != "" {
				t.Errorf("(-sent +stored):\n%s", diff)
			}
			if fields < 10 {
				t.Errorf("only %d fields", fields)
			}
		})
	}
}

// An empty slice and an empty claim are those of the API: what this agent does not set is not sent.
func TestEmptyFields(t *testing.T) {
	for _, own := range []any{kubeapi.Device{Name: "a"}, kubeapi.DeviceTaint{Key: "k", Effect: kubeapi.NoSchedule}} {
		sent, err := json.Marshal(own)
		if err != nil {
			t.Fatal(err)
		}
		var fields map[string]any
		if err := json.Unmarshal(sent, &fields); err != nil {
			t.Fatal(err)
		}
		if len(fields) > 2 {
			t.Errorf("%T sends %s", own, sent)
		}
	}
}

// fill sets every field of v that is sent, and returns how many.
func fill(t *testing.T, v reflect.Value) int {
	t.Helper()
	switch x := v.Addr().Interface().(type) {
	case *time.Time:
		*x = time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
		return 1
	case *json.RawMessage:
		*x = json.RawMessage(`{"kind":"GpuConfig"}`)
		return 1
	}
	n := 0
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).Tag.Get("json") != "-" {
				n += fill(t, v.Field(i))
			}
		}
		return n
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		return fill(t, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		return fill(t, v.Index(0))
	case reflect.Map:
		element := reflect.New(v.Type().Elem()).Elem()
		n = fill(t, element)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("a").Convert(v.Type().Key()), element)
		return n
	case reflect.String:
		v.SetString("7") // also a quantity
	case reflect.Int64:
		v.SetInt(7)
	case reflect.Bool:
		v.SetBool(true)
	default:
		t.Fatalf("a field of kind %s", v.Kind())
	}
	return 1
}
