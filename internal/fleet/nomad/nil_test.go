package nomad

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/hashicorp/nomad/api"
)

// absences calls f for each field of a value that is a pointer, a map or a list, while it is nil. A list with null in it is none that servers send: they
// read it themselves.
func absences(path string, v reflect.Value, f func(path string)) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			absences(path, v.Elem(), f)
		}
	case reflect.Slice:
		for i := range v.Len() {
			absences(fmt.Sprintf("%s[%d]", path, i), v.Index(i), f)
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			absences(fmt.Sprintf("%s[%v]", path, k), v.MapIndex(k), f)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if field := v.Type().Field(i); field.IsExported() {
				without(path+"."+field.Name, v.Field(i), f)
			}
		}
	default:
	}
}

// without calls f while a field is nil, if it can be, and then for what is in it.
func without(path string, v reflect.Value, f func(path string)) {
	if k := v.Kind(); (k == reflect.Pointer || k == reflect.Map || k == reflect.Slice) && !v.IsNil() {
		was := reflect.ValueOf(v.Interface())
		v.SetZero()
		f(path)
		v.Set(was)
	}
	absences(path, v, f)
}

// What servers leave out of an object causes no panic.
func TestAbsentParts(t *testing.T) {
	parts := 0
	try := func(path string, f func()) {
		parts++
		defer func() {
			if p := recover(); p != nil {
				t.Errorf("without %s: %v", path, p)
			}
		}()
		f()
	}
	r := newRegion(3, 2)
	r.fail(0, 0, xid95)
	a := r.run("web", "service", 0, 0)
	r.follow(t, a, nil)
	r.follow(t, r.run("other", "service", 1, 0), nil)
	for name, objects := range map[string]any{"nodes": r.nodes, "allocations": r.allocs, "details": r.details} {
		absences(name, reflect.ValueOf(objects), func(path string) { try(path, func() { r.cluster() }) })
	}
	j, size, cores := job(a, 1), 10, 1
	g := j.TaskGroups[0]
	g.EphemeralDisk = &api.EphemeralDisk{SizeMB: &size}
	g.Networks = []*api.NetworkResource{{Mode: "bridge", DynamicPorts: []api.Port{{Label: "x"}}, ReservedPorts: []api.Port{{Label: "y", Value: 80}}}}
	g.Volumes = map[string]*api.VolumeRequest{"v": {Type: "host", Source: "s"}}
	g.Constraints = []*api.Constraint{{LTarget: "${attr.kernel.name}", Operand: "=", RTarget: "linux"}}
	g.Tasks[0].Resources.Cores = &cores
	absences("job", reflect.ValueOf(j), func(path string) {
		try(path, func() {
			if s, err := specOf(j, "g"); err == nil {
				r.followed["web"].specs = []*spec{s}
				r.cluster()
			}
		})
	})
	one := full(a, j)
	absences("allocation", reflect.ValueOf(one), func(path string) { try(path, func() { allocStubOf(one) }) })
	node := r.details[nodeID(0)]
	absences("node", reflect.ValueOf(node), func(path string) { try(path, func() { stubOf(node); kept(node) }) })
	if parts < 50 {
		t.Errorf("%d parts were left out", parts)
	}
}
