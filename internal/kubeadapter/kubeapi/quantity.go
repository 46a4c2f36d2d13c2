package kubeapi

import (
	"math/big"
	"strconv"
	"strings"
)

// maxExponent limits the decimal exponent of a quantity: the API server's largest value is 2^63-1.
const maxExponent = 18

// maxLength limits the text of a quantity in bytes: the API server writes at most the digits of 2^63-1 and a suffix.
const maxLength = 40

// factors of the suffixes of a quantity (k8s.io/apimachinery/pkg/api/resource).
var factors = map[string]*big.Rat{
	"n": power(10, -9), "u": power(10, -6), "m": power(10, -3), "": power(10, 0),
	"k": power(10, 3), "M": power(10, 6), "G": power(10, 9), "T": power(10, 12), "P": power(10, 15), "E": power(10, 18),
	"Ki": power(2, 10), "Mi": power(2, 20), "Gi": power(2, 30), "Ti": power(2, 40), "Pi": power(2, 50), "Ei": power(2, 60),
}

// ParseQuantity returns the value of a resource.Quantity as the API server writes it: "2", "1k", "1536Mi", "1e3", "500m". ok is false for
// any other text.
func ParseQuantity(text string) (value *big.Rat, ok bool) {
	if len(text) > maxLength {
		return nil, false
	}
	end := len(text) - len(strings.TrimLeft(text, "+-0123456789."))
	value, ok = new(big.Rat).SetString(text[:end])
	if !ok {
		return nil, false
	}
	suffix := text[end:]
	if factor, known := factors[suffix]; known {
		return value.Mul(value, factor), true
	}
	exponent, err := strconv.Atoi(strings.TrimLeft(suffix, "eE"))
	if err != nil || len(strings.TrimLeft(suffix, "eE")) != len(suffix)-1 || exponent < -maxExponent || exponent > maxExponent {
		return nil, false
	}
	return value.Mul(value, power(10, exponent)), true
}

func power(base int64, exponent int) *big.Rat {
	n := new(big.Int).Exp(big.NewInt(base), big.NewInt(int64(max(exponent, -exponent))), nil)
	if exponent < 0 {
		return new(big.Rat).SetFrac(big.NewInt(1), n)
	}
	return new(big.Rat).SetInt(n)
}
