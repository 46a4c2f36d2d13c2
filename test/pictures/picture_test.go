package pictures

import (
	"bytes"
	"cmp"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"slices"
	"testing"
)

// maxPicture is the largest size of a picture in the documents, in bytes.
const maxPicture = 150_000

// savePicture writes a screenshot with its 256 most frequent colours, which is a third of its size.
func savePicture(t *testing.T, path string, screenshot []byte) {
	t.Helper()
	full, err := png.Decode(bytes.NewReader(screenshot))
	must(t, err)
	small := reduced(full)
	var out bytes.Buffer
	must(t, (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, small))
	if out.Len() > maxPicture {
		t.Errorf("%s has %d bytes", path, out.Len())
	}
	must(t, os.WriteFile(path, out.Bytes(), 0o644))
}

func reduced(full image.Image) *image.Paletted {
	bounds, count := full.Bounds(), map[color.RGBA]int{}
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(full.At(x, y)).(color.RGBA) }
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			count[at(x, y)]++
		}
	}
	colors := slices.SortedFunc(maps.Keys(count), func(a, b color.RGBA) int { return cmp.Compare(count[b], count[a]) })
	var palette color.Palette
	for _, c := range colors[:min(256, len(colors))] {
		palette = append(palette, c)
	}
	small, nearest := image.NewPaletted(bounds, palette), map[color.RGBA]uint8{}
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			c := at(x, y)
			if _, ok := nearest[c]; !ok {
				nearest[c] = uint8(palette.Index(c))
			}
			small.SetColorIndex(x, y, nearest[c])
		}
	}
	return small
}
